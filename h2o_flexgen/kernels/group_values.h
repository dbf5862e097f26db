/* Values of a group codec in registers of float32. */

#pragma once

#include "vectors.h"

static ALWAYS_INLINE words words_of_bytes(const uint8_t *from)
{
#if LANES == 16
    return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8
    return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    return __builtin_convertvector(LOAD(bytes, from), words);
#endif
}

typedef struct {
    floats scale, minimum, values; /* values: those of the codes 0 to 15, where a register holds 16 */
} decoder;

static ALWAYS_INLINE decoder decoder_of(packed_group from)
{
    decoder found = {all(from.scale), all(from.minimum), {0}};
#if LANES == 16
    const floats codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    found.values = codes * found.scale + found.minimum;
#endif
    return found;
}

static ALWAYS_INLINE floats decoded_8(words codes, decoder with)
{
    return __builtin_convertvector((integers)codes, floats) * with.scale + with.minimum;
}

static ALWAYS_INLINE floats decoded_4(words codes, decoder with) /* uses the lowest four bits of each word */
{
#if LANES == 16
    return (floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)with.values);
#else
    return decoded_8(codes & 15, with);
#endif
}
