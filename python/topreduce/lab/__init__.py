"""Training and measuring on one machine: the demo and what it is made of."""
