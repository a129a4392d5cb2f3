"""The data: records, schemas, topics and the codec. Imports no other part of rollstream but the core."""
