"""What is known of each framework, once: its streams and arrays, and whose memory and streams its objects stand for."""
