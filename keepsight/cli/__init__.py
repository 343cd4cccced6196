"""The command line: one file a command. May import every room."""
