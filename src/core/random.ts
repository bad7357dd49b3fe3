/**
 * Seeded random numbers, equal on every machine: sfc32, period at least 2^32, about 2 ns each. For simulations and
 * jitter, never for secrets.
 */
export class Random {
  #a: number;
  #b: number;
  #c: number;
  #counter = 1;
  #spare = NaN; // Box-Muller makes two numbers at a time; the second is kept here. NaN if none.

  constructor(seed: number) {
    this.#a = seed | 0;
    // Seeds above 2^32 and fractions change the second word.
    this.#b = Math.trunc(seed / 2 ** 32) | 0;
    this.#c = Math.trunc((seed % 1) * 2 ** 32) | 0;
    // Neighbouring seeds start alike; a few rounds separate them.
    for (let round = 0; round < 15; round++) this.next();
  }

  /** Uniform in [0, 1). */
  next(): number {
    const sum = (((this.#a + this.#b) | 0) + this.#counter) | 0;
    this.#counter = (this.#counter + 1) | 0;
    this.#a = this.#b ^ (this.#b >>> 9);
    this.#b = (this.#c + (this.#c << 3)) | 0;
    this.#c = (((this.#c << 21) | (this.#c >>> 11)) + sum) | 0;
    return (sum >>> 0) / 2 ** 32;
  }

  /** Normal with mean 0 and standard deviation 1. */
  gaussian(): number {
    if (!Number.isNaN(this.#spare)) {
      const spare = this.#spare;
      this.#spare = NaN;
      return spare;
    }
    // 1 - next() is never 0, so the logarithm is finite.
    const radius = Math.sqrt(-2 * Math.log(1 - this.next()));
    const angle = 2 * Math.PI * this.next();
    this.#spare = radius * Math.sin(angle);
    return radius * Math.cos(angle);
  }

  /** Time to the next Poisson arrival. */
  exponential(mean: number): number {
    return -mean * Math.log(1 - this.next());
  }
}
