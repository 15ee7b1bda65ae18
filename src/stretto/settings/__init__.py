"""Settings of runs and studies: defaults < TOML file < command line. No torch."""
