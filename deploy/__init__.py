"""The operations plane: Ray, files, environment, command line, metrics and the demo models."""
