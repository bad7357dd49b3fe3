export const echo = (inputs: unknown[]): unknown[] => inputs;
