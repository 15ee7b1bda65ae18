"""The charts of the report, as altair objects: what they show can be read back as JSON and tested."""
