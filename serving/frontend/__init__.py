"""Parts that the gRPC server and the HTTP server share. This folder imports
neither grpc nor an HTTP package.
"""
