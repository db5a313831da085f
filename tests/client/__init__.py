"""Tests of the Python client against a real gRPC server."""
