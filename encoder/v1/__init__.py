"""Generated code of the wire contract `proto/encoder/v1/encoder.proto` (run `make proto` after a change there)."""
