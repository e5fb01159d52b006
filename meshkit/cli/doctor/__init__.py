"""`chipmesh doctor`: probes gather plain facts of a running mesh; checks are pure functions over them."""
