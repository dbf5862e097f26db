/* Loops that multiply and add in registers alone: nothing is read, so their rate is the peak of the processor's arithmetic.

   Each has several sums that do not depend on each other: enough to hide the latency of its instructions, and few enough for
   the registers that there are, sixteen, or 32 of 512 bits. A function does so many rounds and gives a value of its sums; with
   0 rounds it gives the number of operations in a round, in which a product and its sum are two, as in flop/s. Instructions are
   written out, because compilers see that nothing new is computed. */

#include <immintrin.h>

#define ADD(instruction, sum, a, b) __asm__ volatile(instruction " %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)) /* sum += a * b */
#define SET(instruction, out, a, b) __asm__ volatile(instruction " %2, %1, %0" : "=v"(out) : "v"(a), "v"(b)) /* out = a . b */
#define CHANGE(instruction, out, a) __asm__ volatile(instruction " %1, %0" : "+x"(out) : "x"(a)) /* out = out . a, of SSE */

#define HALVES 0x3f0000003f000000 /* 0.5 in fp32, or in bf16 beside zeros: sums grow, but never out of their range */
#define CODES 0x0503050305030503
#define ONES 0x0001000100010001

#define EACH(first, count) _Pragma("GCC unroll 16") for (int sum = first; sum < count; sum++)
#define LOOP(name, instructions, vector, count, values, operations, each)           \
    __attribute__((target(instructions))) long name(long rounds) {                  \
        vector sums[count], passing, total, x = (vector){0} + values, ones = (vector){0} + ONES; \
        EACH(0, count) total = sums[sum] = x;                                       \
        for (long round = 0; round < rounds; round++) {                             \
            EACH(0, count) { each }                                                 \
        }                                                                           \
        EACH(0, count) total += sums[sum];                                          \
        (void)passing, (void)ones;                                                  \
        return rounds ? (long)total[0] : (long)count * operations;                \
    }

/* fp32 */
LOOP(multiply_add_128, "sse2", __m128i, 12, HALVES, 4 * 2, {
    CHANGE("mulps", sums[sum], x);
    CHANGE("addps", sums[sum], x);
})
LOOP(fma_256, "avx2,fma", __m256i, 12, HALVES, 8 * 2, ADD("vfmadd231ps", sums[sum], x, x);)
LOOP(fma_512, "avx512f", __m512i, 16, HALVES, 16 * 2, ADD("vfmadd231ps", sums[sum], x, x);)

/* bf16 */
LOOP(dpbf16_512, "avx512f,avx512bf16", __m512i, 16, HALVES, 32 * 2, ADD("vdpbf16ps", sums[sum], x, x);)

/* bf16 in tiles of 16 rows. Compilers that do not know them compile the rest. */
#if __GNUC__ >= 11 || __clang_major__ >= 12
__attribute__((target("amx-tile,amx-bf16"))) long tiles_of_bf16(long rounds)
{
    const struct {
        unsigned char palette, start, none[14];
        unsigned short bytes[16];
        unsigned char lines[16];
    } sizes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    long long halves[16 * 8], sums[16 * 8];
    for (int at = 0; at < 16 * 8; at++)
        halves[at] = HALVES;
    if (!rounds)
        return 4 * 16 * 16 * 32 * 2;
    __asm__ volatile("ldtilecfg %0" : : "m"(sizes), "m"(halves));
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    _tile_loadd(4, halves, 64); _tile_loadd(5, halves, 64); _tile_loadd(6, halves, 64); _tile_loadd(7, halves, 64);
    for (long round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_release();
    return sums[0];
}
#endif

/* Integers: of 16 bits where a processor has no better, of 8 bits elsewhere. */
LOOP(madd_128, "sse2", __m128i, 8, CODES, 8 * 2, {
    passing = x;
    CHANGE("pmaddwd", passing, x);
    CHANGE("paddd", sums[sum], passing);
})
#define MADDUBS                                       \
    {                                                 \
        SET("vpmaddubsw", passing, x, x);             \
        SET("vpmaddwd", passing, passing, ones);      \
        SET("vpaddd", sums[sum], sums[sum], passing); \
    }
LOOP(maddubs_256, "avx2", __m256i, 8, CODES, 32 * 2, MADDUBS)
LOOP(maddubs_512, "avx512f,avx512bw", __m512i, 8, CODES, 64 * 2, MADDUBS)
LOOP(dpbusd_256, "avx2,avxvnni", __m256i, 12, CODES, 32 * 2, ADD("%{vex%} vpdpbusd", sums[sum], x, x);)
LOOP(dpbusd_512, "avx512f,avx512vnni", __m512i, 16, CODES, 64 * 2, ADD("vpdpbusd", sums[sum], x, x);)

/* Codes of 4 bits times int8: a sum of 16 bits holds eight products before it has to be widened. The other sums are narrow. */
#define EIGHT                                         \
    {                                                 \
        SET("vpmaddubsw", passing, x, x);             \
        SET("vpaddw", sums[sum], sums[sum], passing); \
        if (sum % 8 == 7) {                           \
            SET("vpmaddwd", passing, sums[sum], ones); \
            SET("vpaddd", total, total, passing);     \
        }                                             \
    }
LOOP(maddubs_256_of_4_bits, "avx2", __m256i, 8, CODES, 32 * 2, EIGHT)
LOOP(maddubs_512_of_4_bits, "avx512f,avx512bw", __m512i, 8, CODES, 64 * 2, EIGHT)
