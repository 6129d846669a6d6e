"""ImageNet's other test sets: ReaL, V2, A, R, Sketch and C, evaluated together."""
