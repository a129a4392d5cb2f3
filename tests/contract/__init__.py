"""What holds between the parts: packaging, import rules, the docs, the chart, the compose file."""
