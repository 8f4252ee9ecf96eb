"""The dashboards, as code that writes their JSON; it needs the development dependencies."""
