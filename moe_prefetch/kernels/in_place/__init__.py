"""Reading memory where it is: what the measurement of links needs of a kernel."""
