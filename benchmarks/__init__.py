"""Scripts that do a whole GPU round in one command and write records."""
