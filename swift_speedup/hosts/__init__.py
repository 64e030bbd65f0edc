"""What training frameworks need: where to attach, how their options reach the plugin."""
