"""What the installed DeepSpeed does right, measured: `dslaunch doctor --numerics` and docs/numerics.md."""
