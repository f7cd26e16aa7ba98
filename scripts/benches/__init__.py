"""What `refmodel bench` measures, one file per group."""
