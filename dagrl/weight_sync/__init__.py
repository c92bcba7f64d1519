"""How weights travel from a trainer to a generator."""
