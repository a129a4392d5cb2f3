"""The serving gateway: agents talk to it as to an OpenAI server, and every model call is in Kafka before its end is seen."""
