"""The door: JaxFlow over gRPC."""
