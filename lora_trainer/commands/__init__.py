"""Sub-commands, one file each: a function that takes the parsed arguments and prints."""
