"""What happens between ranks: buffers, messages, placement, schedules, time, the serving system."""
