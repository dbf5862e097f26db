/* Between tiles and rows of the group codec: the same codes, scales and minima in another order. */

#include "team.h"
#include "tiles.h"

/* The codes of one output in a block, four bytes from each 16 dwords, and those of its row: half of the codes' order. */
static ALWAYS_INLINE void row_to_block(const uint8_t *row, uint8_t *block, long output, int bits)
{
    for (long dword = 0; dword < GROUP * bits / 32; dword++) {
        uint8_t *to = block + (TILE * dword + output) * 4;
        for (int j = 0; j < 4; j++) {
            if (bits == 8) {
                to[j] = row[4 * dword + j];
            } else {
                const long low = 8 * dword + j, high = low + 4; /* a row's byte has the codes of columns c and c + 32 */
                const uint8_t a = row[low % (GROUP / 2)] >> (low < GROUP / 2 ? 0 : 4) & 15;
                const uint8_t b = row[high % (GROUP / 2)] >> (high < GROUP / 2 ? 0 : 4) & 15;
                to[j] = (uint8_t)(a | b << 4);
            }
        }
    }
}

static ALWAYS_INLINE void block_to_row(const uint8_t *block, uint8_t *row, long output, int bits)
{
    if (bits == 8) {
        for (long dword = 0; dword < GROUP / 4; dword++)
            memcpy(row + 4 * dword, block + (TILE * dword + output) * 4, 4);
        return;
    }
    uint8_t codes[GROUP];
    for (long dword = 0; dword < GROUP / 8; dword++)
        for (int j = 0; j < 4; j++) {
            const uint8_t both = block[(TILE * dword + output) * 4 + j];
            codes[8 * dword + j] = both & 15;
            codes[8 * dword + 4 + j] = both >> 4;
        }
    for (int j = 0; j < GROUP / 2; j++)
        row[j] = (uint8_t)(codes[j] | codes[j + GROUP / 2] << 4);
}

typedef struct {
    const uint8_t *from;
    uint8_t *to;
    const int64_t *numbers; /* of the rows that are taken out, or NULL */
    long rows, columns;     /* all rows that are put in, or those that are taken out */
    long outputs;           /* of the tiles, with those that fill up the last one */
    int bits;
} reordering;

static void rows_to_tile(const void *given, long tile, int member)
{
    const reordering *r = given;
    const long groups = groups_of(r->columns), row_bytes = group_row_bytes(r->columns, r->bits), code_bytes = GROUP / 8 * r->bits;
    uint8_t *own = r->to + tile * tile_bytes(r->columns, r->bits);
    memset(own, 0, tile_bytes(r->columns, r->bits));
    for (long output = 0; output < TILE && tile * TILE + output < r->rows; output++) {
        const uint8_t *row = r->from + (tile * TILE + output) * row_bytes, *scales = row + groups * code_bytes;
        for (long group = 0; group < groups; group++) {
            uint8_t *block = own + group * block_bytes(r->bits);
            row_to_block(row + group * code_bytes, block, output, r->bits);
            memcpy(block + block_code_bytes(r->bits) + 2 * output, scales + 2 * group, 2);
            memcpy(block + block_code_bytes(r->bits) + 2 * (TILE + output), scales + 2 * (groups + group), 2);
        }
    }
}

/* Puts rows of the group codec, whole tiles of them but for the last, into tiles. */
void rows_to_tiles(const void *given, int threads)
{
    const reordering *r = given;
    share_out(given, (r->rows + TILE - 1) / TILE, threads, rows_to_tile);
}

static void row_of_tile(const void *given, long place, int member)
{
    const reordering *r = given;
    const long groups = groups_of(r->columns), row_bytes = group_row_bytes(r->columns, r->bits), code_bytes = GROUP / 8 * r->bits;
    const long number = r->numbers[place], output = number % TILE;
    uint8_t *row = r->to + place * row_bytes, *scales = row + groups * code_bytes;
    if (number < 0 || number >= r->outputs) {
        memset(row, 0xff, row_bytes);
        return;
    }
    const uint8_t *own = r->from + number / TILE * tile_bytes(r->columns, r->bits);
    for (long group = 0; group < groups; group++) {
        const uint8_t *block = own + group * block_bytes(r->bits);
        block_to_row(block, row + group * code_bytes, output, r->bits);
        memcpy(scales + 2 * group, block_scales(block, r->bits) + 2 * output, 2);
        memcpy(scales + 2 * (groups + group), block_minima(block, r->bits) + 2 * output, 2);
    }
}

/* Takes the rows with these numbers out of tiles. A number that no output has gives a row of NaN. */
void tiles_to_rows(const void *given, int threads)
{
    const reordering *r = given;
    share_out(given, r->rows, threads, row_of_tile);
}
