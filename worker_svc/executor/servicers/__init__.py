"""One file per service of the device-plugin contract: translation only."""
