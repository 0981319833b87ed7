"""What `tfpreempt inspect` and `tfpreempt verify` find out."""
