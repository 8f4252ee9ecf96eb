"""The one exporter: takes what every process has counted, and renders all of it."""
