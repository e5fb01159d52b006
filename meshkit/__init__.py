"""meshkit: how a chipmesh service starts, speaks, fails and is seen. It never imports torch."""
