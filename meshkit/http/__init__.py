"""The small HTTP side of a service: health, metrics and the routes that a service adds."""
