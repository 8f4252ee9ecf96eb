"""What both planes count, log and trace with; the standard library only, but for tracing."""
