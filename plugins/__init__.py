"""Device plugins: the SDK that a chip vendor imports, and the plugins that ship with chipmesh."""
