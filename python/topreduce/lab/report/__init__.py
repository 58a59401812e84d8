"""What was measured: results.json, tables, charts, one page, and the answer first."""
