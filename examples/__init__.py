"""Examples of use: installed as `dsv4_examples`."""
