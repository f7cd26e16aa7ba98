"""The commands a person runs, one file per command."""
