"""Speed, accuracy and simulation. Of the package only the command line imports it."""
