"""Generated package: protos/generate.py writes everything here but the .proto files."""
