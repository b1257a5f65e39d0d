"""The calls that a user would make instead: one file a library."""
