"""Number formats: what a value becomes when it is stored narrow, and what a narrow matrix product yields."""
