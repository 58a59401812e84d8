"""Races and trainings of methods, on ranks that are processes."""
