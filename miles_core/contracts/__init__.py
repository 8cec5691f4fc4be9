"""What plugin authors subclass: one module a component kind, one abstract class each. No torch is imported here."""
