"""A package, so that its helpers and file names cannot collide with those of other tests."""
