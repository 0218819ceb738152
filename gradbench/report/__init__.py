"""See DESIGN: one room of the house."""
