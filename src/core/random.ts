/**
 * Random numbers from a seed, the same on every machine: sfc32 (Chris Doty-Humphrey's "small fast counting"), with a period of at
 * least 2^32 and about 2 ns a number. For simulations and jitter, never for anything that must not be guessed.
 */
export class Random {
  #a: number;
  #b: number;
  #c: number;
  #counter = 1;
  /** Box-Muller makes two numbers at a time; the second waits here. NaN when there is none. */
  #spare = NaN;

  constructor(seed: number) {
    this.#a = seed | 0;
    // Seeds above 2^32 and fractions still count: they change the second word.
    this.#b = Math.trunc(seed / 2 ** 32) | 0;
    this.#c = Math.trunc((seed % 1) * 2 ** 32) | 0;
    // Neighbouring seeds start alike; a few rounds pull them apart.
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

  /** The time to the next arrival when arrivals come on average every `mean`. */
  exponential(mean: number): number {
    return -mean * Math.log(1 - this.next());
  }
}
