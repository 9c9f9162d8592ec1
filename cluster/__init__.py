"""A whole cluster: configuration, composition, Ray Serve application, directory, command line."""
