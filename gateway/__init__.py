"""The gateway: text to tokens and back, live streams, admission, and the client side of the mesh."""
