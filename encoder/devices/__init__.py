"""What is known of each kind of device: one file a kind, named in `encoder.device.DEVICES`."""
