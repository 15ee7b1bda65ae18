"""Published schedules, one file a family, each beginning with its picture."""
