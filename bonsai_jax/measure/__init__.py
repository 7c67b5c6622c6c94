"""Speed, accuracy and simulation; used by the command line alone."""
