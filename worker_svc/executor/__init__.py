"""The executor: a child process that hosts one device plugin and serves the device-plugin contract."""
