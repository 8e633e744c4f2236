"""The op kinds, by name, and the functions that record them in a graph."""
