"""gRPC for every hop of the mesh: one server, one way to open a channel, the interceptors of both."""
