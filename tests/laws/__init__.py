"""Properties that must hold for every input: locality, selection, causality, invariances."""
